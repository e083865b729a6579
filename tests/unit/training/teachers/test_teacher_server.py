"""A teacher elsewhere: what it answers, what it refuses, and what a run makes of one that it cannot use."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.models.families import save_model
from tests.support.training.post_training.teachers import TeacherServer, in_a_thread, serving
from tllm.cluster.certificates import Authority, Identity
from tllm.cluster.tls import data_client, data_server
from tllm.core.errors import AuthError, ClusterError, ConfigError, FrameError, LinkError, TllmError
from tllm.text.same_vocabulary import vocabulary_digest
from tllm.training.questions.answerer_places import AnswererPlace, AnswererPlaces, AskingRun
from tllm.training.questions.answerer_pool import AnswererPool, ClusterAnswerers
from tllm.training.questions.question_server import HALF_OPEN, QuestionServer
from tllm.training.questions.remote_answerer import RemoteAnswerer
from tllm.training.questions.run_connection import RunConnection
from tllm.training.questions.shared_secret import shared_identity
from tllm.training.teachers.teacher_messages import TEACHING, Answer, Lesson, Question, packed, unpacked
from tllm.training.teachers.teacher_model import TeacherModel
from tllm.training.teachers.teacher_pool import places_of
from tllm.training.teachers.teacher_threads import TeacherConnection, TeacherInquirer, TeacherQueue, checked

LESSON = Lesson(top_k=5, temperature=2.0, vocab_size=101, vocabulary="")
ROW = Question(3, packed(np.array([7, 8, 9, 10, 11])), (2, 3), packed(np.array([0, 3, 4])))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("teacher")
    save_model("llama", made)
    return made


@pytest.fixture(scope="module")
def teacher(folder: Path) -> TeacherModel:
    return TeacherModel.open(str(folder), "float64")


def ids_of(answer: Answer) -> NDArray[np.int64]:
    return np.frombuffer(answer.ids, LESSON.id_type).astype(np.int64)


def identity(secret: Path, make: bool = False) -> Identity:
    return shared_identity(secret, "student", "tllm teach", make)


def dial(server: TeacherServer, secret: Path) -> TeacherConnection:
    return RunConnection.dial(TEACHING, AnswererPlace("here", server.address), data_client(identity(secret)))


def test_each_document_is_taught_by_itself_at_the_temperature(folder: Path, teacher: TeacherModel) -> None:
    truth = save_model("llama", folder).double()
    with torch.no_grad():
        logits_TV = torch.cat([truth(torch.tensor([ids])).logits[0] for ids in ([7, 8], [9, 10, 11])])
    want_TV, order_TV = (logits_TV / 2).log_softmax(-1)[[0, 3, 4]].sort(-1, descending=True)
    answer = teacher.answer(ROW, LESSON)
    log_p = torch.from_numpy(np.frombuffer(answer.log_probs, "<f4").reshape(3, 6).copy())
    assert ids_of(answer).reshape(3, 5).tolist() == order_TV[:, :5].tolist()
    torch.testing.assert_close(log_p[:, :5].double(), want_TV[:, :5], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_p[:, 5].double(), want_TV[:, 5:].logsumexp(-1), rtol=1e-5, atol=1e-5)
    whole = teacher.answer(ROW, msgspec.structs.replace(LESSON, top_k=0))
    assert len(whole.log_probs) == 3 * 101 * 4 and not whole.ids


def test_a_teacher_elsewhere_says_the_same(folder: Path, teacher: TeacherModel, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "key", "float64") as server:
        assert os.stat(tmp_path / "key").st_mode & 0o777 == 0o600
        connection = dial(server, tmp_path / "key")
        assert connection.introduce(LESSON).refused == ""
        sent = connection.send_question(ROW)
        answer, received = connection.receive_answer()
        assert answer == teacher.answer(ROW, LESSON)
        assert (sent, received) == (64 + len(msgspec.msgpack.encode(ROW)), 64 + len(msgspec.msgpack.encode(answer)))
        connection.close()


def test_the_top_64_of_a_real_vocabulary_take_less_than_a_fiftieth_of_all_its_logits(tmp_path: Path) -> None:
    save_model("llama", tmp_path / "teacher", vocab_size=151_936, num_hidden_layers=1)
    counted = {}
    with serving(tmp_path / "teacher", tmp_path / "key") as server:
        for top_k in (64, 0):
            connection = dial(server, tmp_path / "key")
            assert not connection.introduce(Lesson(top_k, 1.0, 151_936, "")).refused
            counted[top_k] = connection.send_question(ROW) + connection.receive_answer()[1]
            connection.close()
    logits_in_two_bytes = 3 * 151_936 * 2
    print({f"bytes a token with top_k = {top_k}": nbytes / 3 for top_k, nbytes in counted.items()})
    assert counted[0] > 3 * 151_936 * 4
    assert 50 * counted[64] < logits_in_two_bytes


BUDGET = msgspec.structs.replace(LESSON, top_k=40, kl_budget=0.05)


def test_a_budget_chooses_how_many_tokens_each_place_has(folder: Path, teacher: TeacherModel, tmp_path: Path) -> None:
    """What is sent is put together again, and what was lost counted by the definition over all tokens."""
    whole = teacher.answer(ROW, msgspec.structs.replace(LESSON, top_k=0))
    p_PV = torch.from_numpy(np.frombuffer(whole.log_probs, "<f4").reshape(3, 101).copy()).double().exp()
    with serving(folder, tmp_path / "key", "float64") as server:
        connection = dial(server, tmp_path / "key")
        assert not connection.introduce(BUDGET).refused
        connection.send_question(ROW)
        answer, received = connection.receive_answer()
        connection.close()
    assert received < 3 * 8 * 40 and checked(answer, ROW, BUDGET, "there") is answer
    counts = answer.token_counts.tolist()
    assert len(set(counts)) > 1, "each place has its own"
    ids, log_p = ids_of(answer), np.frombuffer(answer.log_probs, "<f4")
    lost = 0.0
    for place, k in enumerate(counts):
        first, begin = sum(counts[:place]), sum(counts[:place]) + place
        mine, told = torch.from_numpy(ids[first : first + k]), torch.from_numpy(log_p[begin : begin + k + 1].copy())
        assert mine.tolist() == p_PV[place].topk(k).indices.tolist()
        told_V = torch.full((101,), float(told[-1].double().exp()) / (101 - k), dtype=torch.float64)
        told_V[mine] = told[:-1].double().exp()
        torch.testing.assert_close(told_V[mine], p_PV[place, mine], rtol=1e-5, atol=1e-7)
        lost += float((p_PV[place] * (p_PV[place] / told_V).log()).sum())
    assert answer.lost == pytest.approx(lost, abs=1e-5) and answer.lost <= 3 * BUDGET.kl_budget


def test_codes_of_a_byte_hold_the_budget_too(teacher: TeacherModel) -> None:
    """What a run makes of them is put together, and what was lost counted by the definition over all tokens."""
    lesson = msgspec.structs.replace(BUDGET, log_prob_dtype="uint8")
    whole = teacher.answer(ROW, msgspec.structs.replace(LESSON, top_k=0))
    p_PV = np.exp(np.frombuffer(whole.log_probs, "<f4").reshape(3, 101).astype(np.float64))
    answer = checked(teacher.answer(ROW, lesson), ROW, lesson, "there")
    counts = answer.token_counts
    assert (len(answer.log_probs), len(answer.rests)) == (counts.sum(), 12), "a byte each, and the rest in four"
    ids_PK, log_p_PB = places_of(answer, 3, lesson)
    np.testing.assert_allclose(np.exp(log_p_PB).sum(-1), 1, rtol=1e-6)
    lost = 0.0
    for p_V, ids_K, log_p_B, k in zip(p_PV, ids_PK, log_p_PB, counts, strict=True):
        assert (ids_K >= 0).sum() == k
        told_V = np.full(101, np.exp(log_p_B[-1]) / (101 - k))
        told_V[ids_K[:k]] = np.exp(log_p_B[:k])
        lost += float((p_V * np.log(p_V / told_V)).sum())
    assert answer.lost == pytest.approx(lost, abs=1e-5) and answer.lost <= 3 * lesson.kl_budget
    exact = teacher.answer(ROW, BUDGET)
    assert abs(answer.lost - exact.lost) > 0, "the codes have their part"


def test_a_teacher_that_knows_no_codes_is_told_apart(teacher: TeacherModel) -> None:
    lesson = msgspec.structs.replace(BUDGET, log_prob_dtype="uint8")
    with pytest.raises(ClusterError, match="of rests") as error:
        checked(teacher.answer(ROW, BUDGET), ROW, lesson, "there")
    assert "knows no log_prob_dtype" in error.value.hint


def test_a_budget_is_held_in_a_fiftieth_of_all_logits(tmp_path: Path) -> None:
    """Of 32,000 tokens whose logits are normal with a deviation of 5. Bytes are the connection's, with all headers."""
    model = save_model("llama", tmp_path / "teacher", vocab_size=32_000, num_hidden_layers=1)
    with torch.no_grad():  # a hidden state is as long as the square root of its size
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.normal_(0, 5 / model.config.hidden_size**0.5)
    model.save_pretrained(tmp_path / "teacher")
    places, lesson = 64, Lesson(512, 1.0, 32_000, "", kl_budget=0.1)
    row = Question(1, packed(np.arange(places) * 321), (places,), packed(np.arange(places)))
    with serving(tmp_path / "teacher", tmp_path / "key") as server:
        connection = dial(server, tmp_path / "key")
        connection.introduce(lesson)
        sent = connection.send_question(row)
        answer, received = connection.receive_answer()
        connection.close()
    nbytes, lost = (sent + received) / places, answer.lost / places
    print(f"{nbytes:.0f} bytes a token, {answer.token_counts.mean():.1f} tokens, {lost:.4f} nats")
    assert 0.09 < lost <= lesson.kl_budget
    assert 50 * nbytes < 2 * 32_000, "logits in two bytes"


@pytest.mark.parametrize(
    "answer",
    [
        Answer(3, b"", b""),
        Answer(3, bytes(2 * 3), bytes(4 * 6), counts=bytes(6)),
        Answer(3, bytes(2 * 123), bytes(4 * 126), counts=b"\x29\0" * 3),
        Answer(3, bytes(2 * 3), bytes(4 * 6), counts=b"\1\0" * 3, lost=float("nan")),
        Answer(3, bytes(2 * 4), bytes(4 * 6), counts=b"\1\0" * 3),
        Answer(3, bytes(2 * 3), bytes(4 * 6), counts=b"\1\0" * 3 + b"\1"),
    ],
)
def test_counts_that_do_not_fit_are_refused(answer: Answer) -> None:
    with pytest.raises((ClusterError, FrameError)):
        checked(answer, ROW, BUDGET, "there")


BAD_ROWS = {
    "token 101": Question(1, packed(np.array([101])), (1,), packed(np.array([0]))),
    "token -1": Question(1, packed(np.array([-1])), (1,), packed(np.array([0]))),
    "place 2": Question(1, packed(np.array([1, 1])), (2,), packed(np.array([2]))),
    "documents of": Question(1, packed(np.array([1, 1])), (3,), packed(np.array([0]))),
    "0 places asked for": Question(1, packed(np.array([1, 1])), (2,), b""),
    "5 bytes of numbers": Question(1, b"12345", (1,), packed(np.array([0]))),
}


def test_a_row_that_is_none_is_answered_with_the_reason(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "key") as server:
        connection = dial(server, tmp_path / "key")
        connection.introduce(LESSON)
        for reason, row in BAD_ROWS.items():
            connection.send_question(row)
            assert reason in connection.receive_answer()[0].error
        connection.send_question(ROW)
        assert not connection.receive_answer()[0].error, "it goes on"
        connection.close()


@pytest.mark.parametrize(
    ("lesson", "reason"),
    [
        (msgspec.structs.replace(LESSON, vocabulary="0123456789abcdef"), "its 101 tokens are not the student's 101"),
        (msgspec.structs.replace(LESSON, top_k=101), "top_k is 101 and teacher and student share 101 tokens"),
        (msgspec.structs.replace(LESSON, top_k=0, vocab_size=90), "it has 101 tokens and the student 90"),
        (
            msgspec.structs.replace(LESSON, hidden_states=(1,), hidden_size=64),
            "its hidden_size is 48 and distill.teacher_hidden_size, to which the run projects, is 64",
        ),
        (
            msgspec.structs.replace(LESSON, hidden_states=(-1, 5), hidden_size=48),
            "names the teacher's hidden state 5 and it has 4 layers, so 0 to 4, or -1 to -5 from the end",
        ),
    ],
)
def test_a_run_that_cannot_be_taught_ends_with_the_reason(
    lesson: Lesson, reason: str, folder: Path, tmp_path: Path
) -> None:
    with serving(folder, tmp_path / "key") as server:
        error = failure_of(server.address, tmp_path / "key", lesson)
    assert isinstance(error, ConfigError) and reason in error.message


def test_a_run_with_another_secret_ends_with_one_line(folder: Path, tmp_path: Path) -> None:
    identity(tmp_path / "other", make=True)
    with serving(folder, tmp_path / "key") as server:
        error = failure_of(server.address, tmp_path / "other", LESSON)
        assert isinstance(error, AuthError) and "do not trust each other" in error.message
        with contextlib.closing(socket.create_connection(server.address)) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(100).startswith(b"HTTP"), "it says nothing to whom it does not know"
        connection = dial(server, tmp_path / "key")
        assert connection.introduce(LESSON).refused == "", "it goes on"
        connection.close()


def failure_of(address: tuple[str, int], secret: Path, lesson: Lesson) -> TllmError:
    queue = TeacherQueue("teacher")
    asked = queue.ask(ROW)
    remote = RemoteAnswerer(
        AnswererPlace("there", address), data_client(identity(secret)), TeacherInquirer(lesson), queue
    )
    remote.start()
    try:
        error = asked.answered.exception(20)
    finally:
        queue.close()
        remote.close()
    assert isinstance(error, TllmError)
    return error


def test_teachers_come_and_go_while_their_run_asks(folder: Path, tmp_path: Path) -> None:
    """As nodes do that have the role: who is gone is dialled no more, and takes nothing from the queue."""
    queue, places = TeacherQueue("teacher"), AnswererPlaces()
    with serving(folder, tmp_path / "key") as one, serving(folder, tmp_path / "key") as two:
        cluster = ClusterAnswerers(data_client(identity(tmp_path / "key")), places)
        pool = AnswererPool.of("teacher", cluster, TeacherInquirer(LESSON), queue)
        asked = queue.ask(ROW)
        assert len(pool) == 0 and not asked.answered.done()
        places.tell("teacher", [AnswererPlace("first", one.address)])
        assert asked.answered.result(20)[0].number == ROW.number
        (gone,) = pool
        assert isinstance(gone, RemoteAnswerer)
        assert (gone.name, gone.trouble) == ("first", "")
        places.tell("teacher", [])
        gone._thread.join(20)
        assert not gone._thread.is_alive() and len(pool) == 0
        asked = queue.ask(ROW)
        places.tell("teacher", [AnswererPlace("second", two.address)])
        asked.answered.result(20)
        assert (one.answered, two.answered, asked.times_given_back) == (1, 1, 0)
        queue.close()
        for other in pool:
            other.close()


def test_a_node_with_a_role_answers_the_run_that_it_was_told_of_and_no_other_member(
    teacher: TeacherModel, caplog: pytest.LogCaptureFixture
) -> None:
    authority, told, reasons = Authority.create(), list[AskingRun](), list[str]()
    context = data_server(authority.identity("taught"))
    server = QuestionServer(teacher, TEACHING, ("127.0.0.1", 0), context, lambda: told[-1] if told else None)

    def asking(node: str, run: str) -> TeacherConnection:
        place = AnswererPlace("there", server.address, "taught", run)
        return RunConnection.dial(TEACHING, place, data_client(authority.identity(node)))

    with in_a_thread(server), caplog.at_level("WARNING", "tllm.answers"):
        for node, run, why in (
            ("first", "run", "first asks a teacher of this cluster, which was not told yet whom it answers"),
            ("other", "run", "other asks a teacher of this cluster, which answers first"),
            (
                "first",
                "of before",
                "first asks a teacher of this cluster for the run 'of before', and it answers 'run'",
            ),
        ):
            with pytest.raises(LinkError, match=why):
                asking(node, run)
            reasons.append(why)
            told.append(AskingRun("first", "run"))
        connection = asking("first", "run")
        assert connection.introduce(LESSON).refused == ""
        connection.send_question(ROW)
        assert not connection.receive_answer()[0].error
        told.append(AskingRun("other", "run"))  # rank 0 is on another node since
        connection.send_question(ROW)
        with pytest.raises(LinkError):
            connection.receive_answer()
        connection.close()
    assert server.answered == 1 and all(why in caplog.text for why in (*reasons, "answers 127.0.0.1"))


def test_a_server_that_closes_between_the_two_links_of_a_run_closes_both(teacher: TeacherModel) -> None:
    authority, asked = Authority.create(), list[AskingRun]()

    def asker() -> AskingRun:
        asked.append(AskingRun("run"))
        if len(asked) == 2:  # the first waits for this one
            server.close()
        return asked[-1]

    server = QuestionServer(teacher, TEACHING, ("127.0.0.1", 0), data_server(authority.identity("taught")), asker)
    with in_a_thread(server):
        place = AnswererPlace("there", server.address)
        connection = RunConnection.dial(TEACHING, place, data_client(authority.identity("run")))
        with pytest.raises(LinkError):
            connection.introduce(LESSON)
        connection.close()
    assert len(asked) == 2


def test_a_message_that_is_none_ends_the_connection(folder: Path, tmp_path: Path) -> None:
    with serving(folder, tmp_path / "key") as server:
        connection = dial(server, tmp_path / "key")
        connection.questions.send_bytes(b"\xc1 no lesson")
        with pytest.raises(LinkError):
            connection.answers.recv_bytes(100)
        connection.close()


def test_answers_to_something_else_are_refused() -> None:
    good = Answer(3, bytes(3 * 5 * 2), bytes(3 * 6 * 4))
    assert checked(good, ROW, LESSON, "there") is good
    for bad in (
        msgspec.structs.replace(good, number=4),
        msgspec.structs.replace(good, ids=b""),
        msgspec.structs.replace(good, log_probs=bytes(3 * 5 * 4)),
    ):
        with pytest.raises(ClusterError, match="the teacher at there answers row"):
            checked(bad, ROW, LESSON, "there")
    states = msgspec.structs.replace(LESSON, hidden_states=(0, -1), hidden_size=48, hidden_state_dtype="bfloat16")
    with pytest.raises(ClusterError, match="without the 2 hidden states") as caught:
        checked(good, ROW, states, "there")
    assert "install this version there" in caught.value.hint
    some = msgspec.structs.replace(good, hidden_states=bytes(3 * 2 * 48 * 2 - 2))
    with pytest.raises(ClusterError, match="574 bytes of hidden states, which has 576"):
        checked(some, ROW, states, "there")
    with pytest.raises(ClusterError, match="cannot answer: out of paper"):
        checked(Answer(3, error="out of paper"), ROW, LESSON, "there")


def test_secrets_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AuthError, match="cannot read the secret"):
        identity(tmp_path / "none")
    short = tmp_path / "short"
    short.write_text("guess me")
    short.chmod(0o600)
    with pytest.raises(AuthError, match="has 8 characters, of at least 32"):
        identity(short)
    short.write_text("0" * 64)
    short.chmod(0o644)
    with pytest.raises(AuthError, match="can be read by others"):
        identity(short)


def test_connections_that_say_nothing_take_no_more_descriptors_than_there_are_seats(teacher: TeacherModel) -> None:
    """Nobody needs a certificate to open them."""
    context = data_server(Authority.create().identity("taught"))
    server = QuestionServer(teacher, TEACHING, ("127.0.0.1", 0), context)
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as stack, in_a_thread(server):
        for _ in range(HALF_OPEN + 20):
            stack.enter_context(socket.create_connection(server.address))
        time.sleep(0.5)
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * HALF_OPEN + 20
        stack.close()


def test_log_probabilities_that_are_not_finite_are_an_error(folder: Path) -> None:
    broken = TeacherModel.open(str(folder))
    with torch.no_grad():
        next(broken.part.model.parameters()).fill_(float("nan"))
    assert "are not finite" in broken.answer(ROW, LESSON).error


def test_a_digest_is_of_tokens_and_their_ids() -> None:
    tiny = Path("models/tiny")
    assert len(vocabulary_digest(tiny)) == 16 == len(vocabulary_digest(tiny.resolve()))
    with pytest.raises(FrameError, match="3 bytes of numbers"):
        unpacked(b"123")
