/* Threads that lose their core, for `make test-stalled`: loaded before each process of the tests (LD_PRELOAD), so that a
 * test which passes only while every thread runs at once fails here, and not on a busy machine some weeks later.
 *
 * In every process of Python one thread sends another a signal twice or so a second, and who gets it sleeps in the
 * handler: 40 ms in the mean, 400 at the most. Half of the time it is one that has work, else any. What the system calls
 * of a thread return stays as it was, but for those that a signal interrupts, which Python begins again (PEP 475).
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static const double BETWEEN_SECONDS[] = {0.05, 0.5}, MEAN_SECONDS = 0.04, LONGEST_SECONDS = 0.4;

static volatile double stall_seconds;

static void sleep_for(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

static void stall(int number) {
    int kept = errno;
    (void)number;
    sleep_for(stall_seconds);
    errno = kept;
}

static double drawn(unsigned *seed) { return (rand_r(seed) + 1.0) / (RAND_MAX + 2.0); }

static int is_running(pid_t thread) {
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread);
    FILE *file = fopen(path, "r");
    if (!file) return 0; /* it has ended */
    const char *state = fgets(text, sizeof text, file) ? strrchr(text, ')') : NULL;
    fclose(file);
    return state && state[1] && state[2] == 'R';
}

/* One of this process's other threads, each as likely; 0 where there is none such. */
static pid_t one_of_the_others(pid_t own, int must_run, unsigned *seed) {
    DIR *threads = opendir("/proc/self/task");
    if (!threads) return 0;
    pid_t chosen = 0;
    int seen = 0;
    for (struct dirent *entry; (entry = readdir(threads));) {
        pid_t thread = atoi(entry->d_name); /* 0 for "." and ".." */
        if (thread && thread != own && (!must_run || is_running(thread)) && drawn(seed) * ++seen < 1) chosen = thread;
    }
    closedir(threads);
    return chosen;
}

static void *stall_others(void *of_nothing) {
    pid_t process = getpid(), own = (pid_t)syscall(SYS_gettid);
    unsigned seed = (unsigned)process ^ (unsigned)time(NULL);
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, NULL);
    for (;;) {
        sleep_for(BETWEEN_SECONDS[0] + drawn(&seed) * (BETWEEN_SECONDS[1] - BETWEEN_SECONDS[0]));
        pid_t thread = one_of_the_others(own, drawn(&seed) < 0.5, &seed);
        double seconds = -MEAN_SECONDS * log(drawn(&seed));
        stall_seconds = seconds < LONGEST_SECONDS ? seconds : LONGEST_SECONDS;
        if (thread) syscall(SYS_tgkill, process, thread, SIGRTMAX - 1);
    }
    return of_nothing;
}

__attribute__((constructor)) static void start(void) {
    char program[256];
    ssize_t length = readlink("/proc/self/exe", program, sizeof program - 1);
    if (length <= 0) return;
    program[length] = 0;
    if (!strstr(program, "python")) return;
    struct sigaction action = {.sa_handler = stall, .sa_flags = SA_RESTART};
    sigaction(SIGRTMAX - 1, &action, NULL);
    pthread_t thread;
    if (pthread_create(&thread, NULL, stall_others, NULL) == 0) pthread_detach(thread);
}
