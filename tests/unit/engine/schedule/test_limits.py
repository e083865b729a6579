"""The sizes that follow from what the user says, and refusals that give both numbers."""

from __future__ import annotations

from typing import cast

import msgspec
import pytest

from tests.unit.engine.kits import request
from tllm.cluster.settings import Narrowing
from tllm.core.errors import CapacityError, ConfigError, RequestError
from tllm.engine.schedule.batch import PLAIN_GREEDY
from tllm.engine.schedule.limits import (
    LIKELY_BYTES,
    LOGPROB_BYTES,
    MAX_LOGPROBS,
    EngineConfig,
    check_request,
    limits_of,
)
from tllm.spec.families import spec_from_config
from tllm.spec.plan import Plan
from tllm.spec.request import TokenLogprobs
from tllm.spec.speculative_config import SpeculativeConfig

CONFIG = dict(
    model_type="llama",
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    torch_dtype="float32",
)
SPEC = spec_from_config(CONFIG)
WHOLE = Plan.parse("pp=1", 4)


def test_the_context_is_the_models_own_unless_the_cache_is_smaller() -> None:
    assert limits_of(SPEC, WHOLE, EngineConfig()).max_model_len == 512
    assert limits_of(SPEC, WHOLE, EngineConfig(cache_tokens=100)).max_model_len == 96
    assert limits_of(SPEC, WHOLE, EngineConfig(max_model_len=64)).max_model_len == 64


def test_bytes_are_those_of_the_fullest_rank() -> None:
    # Keys and values of a token: 2 kv heads of width 8 in 4 bytes, twice, for each layer held.
    one_layer = 2 * 2 * 8 * 4
    assert limits_of(SPEC, WHOLE, EngineConfig(cache_bytes=100 * 16 * 4 * one_layer)).num_pages == 100
    uneven = Plan.parse("pp=2,layers=1+3", 4)
    assert limits_of(SPEC, uneven, EngineConfig(cache_bytes=100 * 16 * 3 * one_layer)).num_pages == 100


def test_prefixes_are_shared_where_keys_do_not_depend_on_the_length() -> None:
    assert limits_of(SPEC, WHOLE, EngineConfig()).enable_prefix_caching
    assert not limits_of(SPEC, WHOLE, EngineConfig(enable_prefix_caching=False)).enable_prefix_caching
    dynamic = spec_from_config({**CONFIG, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})
    assert not limits_of(dynamic, WHOLE, EngineConfig()).enable_prefix_caching


@pytest.mark.parametrize(
    ("config", "kind", "words"),
    [
        (EngineConfig(max_model_len=513), ConfigError, "513 .* context of 512"),
        (EngineConfig(max_model_len=0), ConfigError, "max_model_len 0"),
        (EngineConfig(cache_tokens=15), CapacityError, "15 tokens holds no page of 16"),
        (EngineConfig(cache_bytes=1), CapacityError, "no page"),
        (EngineConfig(cache_tokens=64, max_model_len=65), CapacityError, "holds 64 tokens and max_model_len is 65"),
        (EngineConfig(cache_tokens=64, cache_bytes=10**6), ConfigError, "both in tokens and in bytes"),
        (EngineConfig(max_num_seqs=64, max_num_batched_tokens=64), ConfigError, "64 tokens leave no room"),
        (EngineConfig(max_num_batched_tokens=0), ConfigError, "batches of 0 tokens leave no room"),
        (EngineConfig(page_size=0), ConfigError, "page_size is 0, and must be 1 at least"),
        (EngineConfig(page_size=0, cache_tokens=64), ConfigError, "page_size is 0"),
        (EngineConfig(max_num_seqs=-1), ConfigError, "max_num_seqs is -1"),
        (EngineConfig(cache_dir="pages", cache_dir_size=0), ConfigError, "cache_dir_size is 0"),
        (EngineConfig(num_speculative_tokens=-1), ConfigError, "num_speculative_tokens is -1"),
        (EngineConfig(speculative_config=SpeculativeConfig(num_speculative_tokens=0)), ConfigError, "at least 1"),
        (EngineConfig(narrow_wire=cast(Narrowing, "int7")), ConfigError, "narrow_wire is 'int7'"),
    ],
)
def test_what_does_not_fit_is_refused(config: EngineConfig, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        limits_of(SPEC, WHOLE, config)


def test_what_a_prompt_comes_to_fits_the_message_that_has_it() -> None:
    """Else the message ended the channel of the node that sent it, in each epoch anew."""
    large = TokenLogprobs(2**31, -1.5, ((2**31, -1.5),) * MAX_LOGPROBS, 2**31)
    assert len(msgspec.msgpack.encode(large)) <= LOGPROB_BYTES + MAX_LOGPROBS * LIKELY_BYTES
    assert len(msgspec.msgpack.encode(large.cut(0))) <= LOGPROB_BYTES
    sizes = limits_of(SPEC, WHOLE, EngineConfig())
    for top, words in ((MAX_LOGPROBS, r"prompt_logprobs 20 of 180000 tokens may take \d+ bytes"), (0, "context holds")):
        with pytest.raises(RequestError, match=words):
            check_request(request("a", [1] * 180_000, prompt_logprobs=top), (), PLAIN_GREEDY, sizes, ())
