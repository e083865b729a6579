"""`tllm serve`, `join` and `status` as users run them, on one machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster.commands import running, tllm
from tests.support.serving.completions import completed
from tllm.recipes.bench.processes import free_row

pytestmark = pytest.mark.timeout(300)  # each starts several processes that load torch


def test_another_machine_joins_by_the_printed_line(folder: Path) -> None:
    whole = json.loads(tllm("generate", str(folder), "--prompt-ids", "1,2,3", "--max-tokens", "16", "--json").stdout)
    words = ["--nodes", "2", "--plan", "pp=2,tp=1+2", "--cluster-host", "127.0.0.1", "--port", "0"]
    with running("serve", str(folder), *words) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        with running("join", line[1], "--token", line[2], "--name", "lab-2", "--serve", "--port", "0") as node:
            url = server.until(r"serving .* at (\S+)")[1]
            assert completed(url, (1, 2, 3), 16) == whole["token_ids"]
            assert completed(node.until(r"serving .* at (\S+)")[1], (1, 2, 3), 16) == whole["token_ids"]
            status = tllm("status", "--json", "--port", url.split(":")[2].split("/")[0])
            nodes = json.loads(status.stdout)["nodes"]
            assert sorted((one["rank"], one["node"]) for one in nodes)[2] == (2, "lab-2")
            assert sum(one["bytes_read"] for one in nodes) < 2 * (folder / "model.safetensors").stat().st_size
            assert server.interrupt()[0] == 0
            code, said = node.wait()
    assert code == 0
    assert "the coordinator ended the cluster" in said


def test_machines_that_share_a_secret_need_no_token_and_find_a_first_machine_again(folder: Path) -> None:
    """As pods do: the first is killed and started again, and the node, which was not, goes on with it."""
    whole = json.loads(tllm("generate", str(folder), "--prompt-ids", "1,2,3", "--max-tokens", "16", "--json").stdout)
    port, env = free_row(1), {"TLLM_SECRET": "s" * 32}
    words = ["serve", str(folder), "--nodes", "2", "--plan", "pp=2", "--cluster-host", "127.0.0.1", "--port", "0"]
    words += ["--cluster-port", str(port)]
    with running(*words, env=env) as server:
        where = server.until(r"tllm join (\S+)$")[1]
        assert where == f"127.0.0.1:{port}"
        stranger = tllm("join", where, env={"TLLM_SECRET": "t" * 32})
        assert (stranger.returncode, stranger.stderr.count("not the one that the join token")) == (5, 1)
        with running("join", where, "--rejoin", "60", env=env) as node:
            assert completed(server.until(r"serving .* at (\S+)")[1], (1, 2, 3), 16) == whole["token_ids"]
            server.process.kill()
            server.process.wait()
            with running(*words, env=env) as again:
                assert completed(again.until(r"serving .* at (\S+)")[1], (1, 2, 3), 16) == whole["token_ids"]
                assert again.interrupt()[0] == 0
            assert node.wait()[0] == 0
    assert "tllm1-" not in "".join([*server.lines, *again.lines])
    short = tllm("join", where, env={"TLLM_SECRET": "s"})
    assert (short.returncode, "TLLM_SECRET has 1 characters of at least 32" in short.stderr) == (5, True)


def test_a_wrong_token_is_refused_and_harms_nobody(folder: Path) -> None:
    words = ["--nodes", "2", "--plan", "pp=2", "--cluster-host", "127.0.0.1", "--port", "0"]
    with running("serve", str(folder), *words) as server:
        line = server.until(r"tllm join (\S+) --token (\S+)")
        wrong = line[2][:10] + ("A" if line[2][10] != "A" else "B") + line[2][11:]
        refused = tllm("join", line[1], "--token", wrong)
        assert refused.returncode == 5
        assert refused.stderr.count("join token is not one of this cluster") == 1
        with running("join", line[1], "--token", line[2], "--name", "lab-2"):
            assert len(completed(server.until(r"serving .* at (\S+)")[1], (1, 2, 3), 16)) == 16
            code, said = server.interrupt()
    assert code == 0
    assert "was refused" in said


def test_ctrl_c_while_nodes_are_awaited(folder: Path) -> None:
    with running("serve", str(folder), "--nodes", "2", "--cluster-host", "127.0.0.1", "--port", "0") as server:
        server.until("tllm join")
        code, said = server.interrupt()
    assert code == 130
    assert "Traceback" not in said


def test_no_coordinator_there() -> None:
    token = "tllm1-" + "A" * 86
    refused = tllm("join", "127.0.0.1:9", "--token", token)
    assert refused.returncode == 4
    assert refused.stderr.count("\n") <= 2
