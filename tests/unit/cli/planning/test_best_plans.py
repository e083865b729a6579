"""`tllm plan --goal`: what it prints, and one clear line for each fault of a cluster file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tllm.api.engine_options import EngineOptions, engine_options, read_spec
from tllm.cli.main import main
from tllm.cli.planning.plan_chooser import ServingChooser
from tllm.cluster.settings import EngineSettings
from tllm.node.coordinator.cluster_options import ClusterOptions
from tllm.node.coordinator.survey import SurveyRequest
from tllm.planner.cluster.cluster_file import parse_cluster
from tllm.planner.cost.cache_room import (
    MAX_NUM_BATCHED_TOKENS,
    MAX_NUM_SEQS,
    PAGE_SIZE,
    RUNTIME_BYTES,
    working_bytes,
)
from tllm.planner.cost.rank_bytes import rank_bytes
from tllm.planner.cost.serving_load import ServingFacts
from tllm.planner.measured.survey import (
    Goal,
    Survey,
    SurveyedNode,
    SurveyedPass,
    SurveyedPath,
    cluster_of,
    digest,
    read_survey,
)
from tllm.spec.plan import Plan

CLUSTER = """
[link]
latency = "0.2 ms"
bandwidth = "1 Gbit/s"

[[node]]
name = "box"
count = 2
memory = "2 GB"
memory_bandwidth = "20 GB/s"
flops = { bfloat16 = "100 Gflop/s", float32 = "50 Gflop/s" }

[[node]]
name = "slow"
memory = "1 GB"
memory_bandwidth = "100 MB/s"
flops = { bfloat16 = "1 Gflop/s", float32 = "1 Gflop/s" }
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def plan(folder: Path, cluster: Path, *more: str) -> int:
    return main(["plan", str(folder), "--cluster", str(cluster), *more])


def test_serving_plans_are_compared(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert plan(folder, cluster, "--goal", "serve", "--explain", "--svg", str(tmp_path / "ring.svg")) == 0
    text = capsys.readouterr().out
    for words in ("exact", "ms/token", "the time goes to", "box0", "where a token's time goes", "waiting"):
        assert words in text
    assert (tmp_path / "ring.svg").read_text().count("<rect") >= 2


def test_what_slows_a_plan_down_is_left_out(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(folder, cluster, "--goal", "serve", "--json") == 0
    got = json.loads(capsys.readouterr().out)
    best = got["choices"][0]
    assert got["exact"] and "slow" not in best["nodes"]
    assert best["tokens_per_second"] == max(choice["tokens_per_second"] for choice in got["choices"])
    assert all(sum(one.values()) == 2 * one["total"] for one in best["memory"])


def test_training_plans_are_compared(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--goal", "train", "--batch", "4", "--seq", "32", "--top", "2")
    assert plan(folder, cluster, *asked, "--explain") == 0
    text = capsys.readouterr().out
    for words in ("s/step", "MFU", "microbatch", "where a step's time goes", "optimizer"):
        assert words in text
    assert plan(folder, cluster, *asked, "--json") == 0
    choices = json.loads(capsys.readouterr().out)["choices"]
    assert len(choices) == 2 and choices[0]["seconds"] <= choices[1]["seconds"]


@pytest.mark.parametrize("goal", ["serve", "train"])
def test_a_plan_that_is_given_is_predicted(
    folder: Path, cluster: Path, goal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, cluster, "--goal", goal, "--plan", "pp=2", "--seq", "32") == 0
    assert "as given" in capsys.readouterr().out
    assert plan(folder, cluster, "--goal", goal, "--plan", "pp=4") == 3
    assert "4 ranks and the cluster 3 devices" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "has_bound"), [("pp=2", True), ("pp=2,tp=1+2", False)])
def test_a_bound_is_told_beside_plans_of_the_forms_that_are_searched(
    folder: Path, cluster: Path, given: str, has_bound: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--goal", "train", "--plan", given, "--seq", "32")
    assert plan(folder, cluster, *asked) == 0
    assert ("every plan without a grid, of the forms that are searched, takes" in capsys.readouterr().out) == has_bound
    assert plan(folder, cluster, *asked, "--json") == 0
    assert (json.loads(capsys.readouterr().out)["least_seconds"] is not None) == has_bound


@pytest.mark.parametrize(
    ("change", "code", "words"),
    [
        (("memory = ", "memry = "), 2, "unknown field `memry`"),
        (('"20 GB/s"', '"-20 GB/s"'), 2, "must be more than 0"),
        (('"20 GB/s"', '"20 GB"'), 2, "memory_bandwidth of node 'box' is '20 GB'"),
        (('memory = "2 GB"', "memory = 0"), 2, "memory of node 'box' is 0 and must be more than 0"),
        (('[link]\nlatency = "0.2 ms"\nbandwidth = "1 Gbit/s"', ""), 2, "no link between nodes box0 and box1"),
        (('latency = "0.2 ms"', 'latency = "-1 ms"'), 2, "must be 0 or more"),
        (('memory = "2 GB"', 'memory = "2 GB"\noperation = nan'), 2, "operation of node 'box' is nan and must be 0 or"),
        (('memory = "2 GB"', 'memory = "2 GB"\noperation = inf'), 2, "operation of node 'box' is inf and must be 0 or"),
        (("bfloat16", "float16"), 2, "no speed in bfloat16"),
        (('name = "slow"', 'name = "box0"'), 2, "two nodes 'box0'"),
        (('memory = "2 GB"', 'memory = "300 MB"'), 3, "fits nowhere"),
        (("count = 2", "count = 0"), 2, "has count = 0"),
        (("[[node]]", "[[nodes]]"), 2, "unknown field `nodes`"),
        (("[link]", "[[link]]"), 2, "[[pair]] may come often, [link], [execution] and [failures] once"),
    ],
)
def test_faults_get_one_clear_line(
    folder: Path, cluster: Path, change: tuple[str, str], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CLUSTER.replace(*change)
    assert text != CLUSTER
    cluster.write_text(text.replace('memory = "1 GB"', 'memory = "300 MB"') if code == 3 else text)
    assert plan(folder, cluster, "--goal", "serve") == code
    error = capsys.readouterr().err
    assert words in error
    assert len(error.strip().splitlines()) == 2, "the fault, and a hint"


def test_a_goal_needs_a_cluster(folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--goal", "serve"]) == 2
    assert "--cluster is left out" in capsys.readouterr().err
    assert plan(folder, cluster) == 2
    assert "--goal is left out" in capsys.readouterr().err


def survey_of_two(folder: Path, goal: Goal = "serve") -> Survey:
    """Of a machine that is ten times slower than the other."""
    nodes = []
    for name, slow in (("box", 1.0), ("pi", 10.0)):
        layers = [SurveyedPass(rows, rows, ranks, slow * rows * 1e-3 / ranks) for rows in (1, 64) for ranks in (1, 2)]
        logits = (SurveyedPass(1, 1, 1, slow * 1e-3),)
        machine = dict(node=name, host_name=name, cores=2, threads=2, busy=2.0, memory_bytes=2**32)
        nodes.append(SurveyedNode(**machine, layers=tuple(layers), logits=logits))
    ways = (SurveyedPath(0, 1, 1e-2, 1e6), SurveyedPath(1, 0, 1e-2, 1e6))
    return Survey(
        model=digest(read_spec(folder)),
        goal=goal,
        dtype="bfloat16",
        nodes=tuple(nodes),
        paths=ways,
        intra_host="memory",
    )


def test_who_is_left_out_and_what_that_is_worth(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A node ten times slower behind a slow link: alone the other is faster, and that is said with both numbers."""
    spec = read_spec(folder)
    options = EngineOptions(folder, spec, Plan.parse("pp=2", spec.num_layers), "bfloat16", 1, 16, None, None, 8)
    facts, survey = ServingFacts("bfloat16", 64, 16, 1), survey_of_two(folder)
    auto = ServingChooser(options, facts, None, 2)
    work, ranks = auto(survey)
    assert (work.plan.world_size, ranks) == (1, (0,))
    said = re.search(
        r"left out: pi; all 2 together would give (\S+) tokens/s, this plan gives (\S+)", capsys.readouterr().out
    )
    assert said is not None and float(said[1]) < float(said[2])
    never = ServingChooser(options, facts, None, 2, leave_out=False)
    work, ranks = never(survey)
    assert work.plan.world_size == 2 and set(ranks) == {0, 1}
    assert "left out" not in capsys.readouterr().out
    assert never.chosen is not None and auto.chosen is not None
    assert never.chosen.predicted.tokens_per_second == pytest.approx(float(said[1]), rel=0.01)


def test_a_chosen_serving_plan_waits_as_long_as_was_asked_for(folder: Path) -> None:
    options = engine_options(folder, "pp=2", dtype="bfloat16", lost_after=40.0, allow_mixed=True)
    work, _ = ServingChooser(options, ServingFacts("bfloat16", 64, 16, 1), None, 2)(survey_of_two(folder))
    assert isinstance(work.settings, EngineSettings)
    assert (work.settings.link_seconds, work.lost_after, work.allow_mixed) == (80.0, 40.0, True)


def test_a_chosen_plan_has_room_for_what_the_engine_computes_with(folder: Path) -> None:
    """Its batches are larger than those that the plan was chosen for."""
    options = engine_options(folder, "pp=2", dtype="bfloat16")
    (whole,) = rank_bytes(options.spec, Plan.parse("pp=1", options.spec.num_layers), "bfloat16")
    working = working_bytes(options.spec, whole, "bfloat16", MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS)
    memory = RUNTIME_BYTES + whole.weights + working + 8 * PAGE_SIZE * whole.kv_per_token
    survey = survey_of_two(folder).within({"box": memory, "pi": memory})
    work, _ = ServingChooser(options, ServingFacts("bfloat16", 64, 16, 1), None, 2)(survey)
    assert isinstance(work.settings, EngineSettings) and work.plan.world_size == 1
    assert (work.settings.num_pages, work.settings.max_num_seqs) == (8, MAX_NUM_SEQS)


def test_a_plan_is_not_chosen_that_has_no_room_for_what_the_engine_computes_with(folder: Path) -> None:
    """One machine could hold the model with a single request, and not with as many as the engine makes room for."""
    options = engine_options(folder, "pp=2", dtype="bfloat16")
    (whole,) = rank_bytes(options.spec, Plan.parse("pp=1", options.spec.num_layers), "bfloat16")
    working = working_bytes(options.spec, whole, "bfloat16", MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS)
    memory = RUNTIME_BYTES + whole.weights + working - PAGE_SIZE * whole.kv_per_token
    survey = survey_of_two(folder).within({"box": memory, "pi": memory})
    work, _ = ServingChooser(options, ServingFacts("bfloat16", 64, 16, 1), None, 2)(survey)
    assert isinstance(work.settings, EngineSettings) and work.plan.world_size == 2
    assert work.settings.num_pages >= 5, "those of the requests that the plan is for"


def test_what_is_left_for_the_cache_is_shared_with_that_of_a_draft_model(folder: Path) -> None:
    """Here of the very model, so that each page takes twice its bytes."""
    drafts = {"model": str(folder), "num_speculative_tokens": 5}
    options = engine_options(folder, "pp=2", dtype="bfloat16", speculative_config=drafts)
    (whole,) = rank_bytes(options.spec, Plan.parse("pp=1", options.spec.num_layers), "bfloat16")
    working = working_bytes(options.spec, whole, "bfloat16", MAX_NUM_BATCHED_TOKENS, 6 * MAX_NUM_SEQS)
    memory = RUNTIME_BYTES + 2 * whole.weights + working + 40 * PAGE_SIZE * whole.kv_per_token
    facts = ServingFacts("bfloat16", 64, 16, 1, num_speculative_tokens=5, draft_model=options.spec)
    survey = survey_of_two(folder).within({"box": memory, "pi": memory})
    work, _ = ServingChooser(options, facts, None, 2)(survey)
    assert isinstance(work.settings, EngineSettings) and work.plan.world_size == 1
    assert work.settings.num_pages == 20


def test_memory_that_was_given_bounds_what_was_measured(folder: Path) -> None:
    survey = survey_of_two(folder).within({"box": 2**20, "pi": 2**40})
    assert [device.memory for device in cluster_of(survey, read_spec(folder)).devices] == [2**20, 2**32]


def test_memory_that_was_given_once_bounds_no_later_start(folder: Path, tmp_path: Path) -> None:
    """A survey that is kept says what was measured; it had what the first start was given, for all that came after."""
    path = tmp_path / "kept" / "survey.json"
    survey_of_two(folder).within({"box": 2**20, "pi": 2**20}).save(path)
    known = read_survey(path)
    assert known is not None
    cluster = cluster_of(known.within({"box": 2**21, "pi": 2**40}), read_spec(folder))
    assert [device.memory for device in cluster.devices] == [2**21, 2**32]


def test_a_running_cluster_is_asked_for_what_it_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {"survey": msgspec.to_builtins(survey_of_two(folder))}
    monkeypatch.setattr("tllm.cli.planning.live_survey.fetch", lambda *where: told)
    words = ["plan", str(folder), "--live", "--goal", "serve", "--dtype", "bfloat16"]
    assert main(words) == 0
    assert "box alone is faster than any two together" in capsys.readouterr().out
    assert main([*words[:4], "train", *words[5:]]) == 2
    assert "measured itself for goal serve, and train is asked for" in capsys.readouterr().err
    told["survey"]["nodes"][0]["layers"][0]["seconds"] = -1
    assert main(words) == 2
    assert "is not a survey" in capsys.readouterr().err
    told["survey"] = None
    assert main(words) == 4
    assert "has not measured its machines" in capsys.readouterr().err


def test_where_a_running_cluster_is_not_the_options_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(folder), "--live", "--goal", "serve", "--port", "1"]) == 4
    told, hint = capsys.readouterr().err.splitlines()
    assert "no server at 127.0.0.1:1: Connection refused" in told
    assert hint == "hint: give --host and --port as `tllm serve` has printed them"


def test_machines_that_join_are_measured_once_if_it_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known: list[Survey | None] = []

    async def survey_nodes(asked: SurveyRequest, config: str, nodes: int, options: ClusterOptions) -> Survey:
        known.append(asked.known)
        assert (nodes, options.local, options.threads) == (2, 1, 3)
        assert options.source is not None
        options.source.start(1, "10.0.0.1:7", "token")
        return survey_of_two(folder)

    monkeypatch.setattr("tllm.node.coordinator.survey_cluster.survey_nodes", survey_nodes)
    words = ["--nodes", "2", "--goal", "serve", "--threads", "3", "--keep", str(tmp_path), "--json"]
    for _ in range(2):
        assert main(["plan", str(folder), "--dtype", "bfloat16", *words]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["choices"][0]["nodes"] == ["box"]
        assert "tllm join 10.0.0.1:7 --token token" in shown.err
    assert known == [None, survey_of_two(folder)]


GUIDE = (Path(__file__).parents[4] / "docs" / "guides" / "plan.md").read_text()


def test_the_guide_has_a_cluster_that_is_one() -> None:
    text = re.search(r"```toml\n(\[link\].*?)```", GUIDE, re.DOTALL)
    assert text is not None
    found = re.sub(
        "profile = .*", 'memory = "1 GB"\nmemory_bandwidth = "1 GB/s"\nflops = { float32 = "1 Gflop/s" }', text[1]
    )
    cluster = parse_cluster(found, Path("cluster.toml"))
    assert cluster.names == ("box0", "box1", "box2", "pi")
    assert cluster.link(2, 3).latency == 0.02 and cluster.link(0, 1).latency == 0.0002


@pytest.mark.parametrize("goal", ["serve", "train"])
def test_the_guide_tells_of_every_key(
    folder: Path, cluster: Path, goal: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, cluster, "--goal", goal, "--json", "--batch", "4", "--seq", "32") == 0
    got = json.loads(capsys.readouterr().out)
    best = got["choices"][0]
    inside = [key for one in ("stages", "bytes_sent") if one in best for key in best[one][0] if key != "nodes"]
    assert {key for key in (*got, *best, *inside) if f"`{key}`" not in GUIDE and f".{key}" not in GUIDE} == set()


def test_a_prompt_that_the_model_does_not_take_is_counted_as_far_as_it_does(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--goal", "serve", "--prompt", "9000", "--reply", "10")
    longest = read_spec(folder).max_model_len
    assert plan(folder, cluster, *asked) == 0
    assert f"9000 tokens in and 10 out are more than the context of {longest}: {longest - 10} and 10 are counted" in (
        capsys.readouterr().out
    )
    assert plan(folder, cluster, *asked, "--json") == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == longest - 10


@pytest.mark.parametrize(("asked", "tokens"), [(None, 8192), (2048, 2048), (9000, 9000)])
def test_a_model_that_sees_both_ways_computes_the_context_that_is_asked_for_at_once(
    asked: int | None, tokens: int, folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batches have room for the longest prompt, of as many sequences as the engine computes at once."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False, "max_position_embeddings": 16384}))
    given = () if asked is None else ("--max-model-len", str(asked))
    spec = read_spec(folder)
    [rank] = rank_bytes(spec, Plan.parse("pp=1", spec.num_layers), spec.dtype)
    for requests, more, sequences in ((32, (), MAX_NUM_SEQS), (1, ("--max-num-seqs", "9"), 9)):
        asked_for = ("--goal", "serve", "--concurrency", str(requests), "--plan", "pp=1", "--json")
        assert plan(folder, cluster, *asked_for, *given, *more) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["reply"] == 1, "it embeds, and writes nothing"
        [memory] = told["choices"][0]["memory"]
        assert memory["working"] == working_bytes(spec, rank, spec.dtype, tokens, sequences)


def test_of_a_model_that_embeds_answers_are_told_and_no_tokens(
    folder: Path, cluster: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    asked = ("--goal", "serve", "--concurrency", "40", "--plan", "pp=2")
    assert plan(folder, cluster, *asked, "--explain", "--svg", str(tmp_path / "prompts.svg")) == 0
    text = capsys.readouterr().out
    assert re.search(r"plan +nodes +answer +answers/s +most memory", text)
    assert "% of a prompt's way through" in text or "which the others wait for" in text
    assert text.count("where all prompts' time goes, ms:") == text.count("time goes, ms:") == 1
    assert not re.search(r"tokens/s|ms/token|first token|a token's", text)
    assert ": prompts</text>" in (tmp_path / "prompts.svg").read_text()
    assert plan(folder, cluster, *asked, "--json") == 0
    [choice] = json.loads(capsys.readouterr().out)["choices"]
    assert choice["per_token"] is None and choice["tokens_per_second"] == pytest.approx(40 / choice["seconds"])
    for stage in choice["stages"]:
        assert sum(seconds for part, seconds in stage.items() if part != "nodes") == pytest.approx(choice["seconds"])


def test_a_context_longer_than_the_model_has_is_refused(
    folder: Path, cluster: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longest = read_spec(folder).max_model_len
    assert plan(folder, cluster, "--goal", "serve", "--max-model-len", str(longest + 1)) == 2
    assert f"max_model_len {longest + 1} is more than the model's context of {longest}" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named_once(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(folder, tmp_path / "no.toml", "--goal", "serve") == 2
    assert f"cannot read the cluster {tmp_path / 'no.toml'}: No such file or directory\n" in capsys.readouterr().err
