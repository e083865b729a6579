"""`CommandDoor`: a socket at which a program that a shell has started (`ask_at_door.py`) becomes a forked command."""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType

from tests.support.commands.ask_at_door import EXECUTE
from tests.support.commands.forked_command import command_server, read_at_import
from tests.support.commands.start import hear


class CommandDoor:
    """Open while in its `with`. What asks here belongs to the test's process, in the asking one's group of processes
    and on the host that its environment names."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tllm-door-"))  # a socket's path may have 107 bytes
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "door"))
        self._listener.listen()
        threading.Thread(target=self._accept, name="door", daemon=True).start()

    def __enter__(self) -> CommandDoor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self._folder)

    @property
    def words(self) -> str:
        """The beginning of a shell's command line that runs a module, or a program in a file, by this door."""
        asks = Path(__file__).with_name("ask_at_door.py")
        return shlex.join([sys.executable, "-I", "-S", str(asks), str(self._folder / "door")])

    def _accept(self) -> None:
        while True:
            try:
                control, _ = self._listener.accept()
            except OSError:  # it is closed
                return
            threading.Thread(target=self._serve, args=(control,), name="at the door", daemon=True).start()

    def _serve(self, control: socket.socket) -> None:
        """Start one command, and tell who asked for it how it ended."""
        with control:
            heard = hear(control)
            assert heard is not None
            start, files = heard
            is_forked = read_at_import(start.environment) == command_server().environment
            pid = command_server().fork(start, files) if is_forked else None
            for file in files:
                os.close(file)
            if pid is None:
                control.sendall(EXECUTE)
                return
            _, status = os.waitpid(pid, 0)
            control.sendall(b"%d" % os.waitstatus_to_exitcode(status))
