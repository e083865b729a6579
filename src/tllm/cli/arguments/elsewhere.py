"""Commands and options that people know from other programs, and what stands here in their place.

The programs are vLLM, SGLang, llama.cpp, ollama, text-generation-inference, torchrun and accelerate. Keys of their
trainers are told of where the keys of a job are read (`tllm.training.job.job_file`).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from fnmatch import fnmatchcase

COMMANDS_ELSEWHERE = {
    "run": "`tllm chat MODEL` talks to a model, `tllm generate MODEL --prompt TEXT` continues a text",
    "complete": "`tllm generate MODEL --prompt TEXT` continues a text",
    "pull": "a MODEL that is given as ORG/NAME is fetched when a command needs it",
    "download": "a MODEL that is given as ORG/NAME is fetched when a command needs it",
    "version": "give --version",
    "list": "`tllm models` lists the models of this machine",
    "ls": "`tllm models` lists the models of this machine",
    "ps": "`tllm status` shows a running cluster",
    "stop": "Ctrl-C, or SIGTERM, ends a command that serves or trains",
    "launch": "`tllm serve MODEL` or `tllm train JOB`; with --nodes N it prints the line for the other machines",
    "api_server": "`tllm serve MODEL`",
    "server": "`tllm serve MODEL`",
    "finetune": "`tllm train JOB`, JOB being a TOML file",
    "sft": '`tllm train JOB`; the job says task = "sft"',
    "dpo": '`tllm train JOB`; the job says task = "dpo"',
    "kto": '`tllm train JOB`; the job says task = "kto"',
    "grpo": '`tllm train JOB`; the job says task = "grpo"',
    "reward": '`tllm train JOB`; the job says task = "reward"',
    "convert": "models are read as they are: Hugging Face folders and GGUF files",
    "quantize": "--quantize of `tllm serve` rounds weights while they are loaded",
    "merge": "`tllm export MODEL FOLDER --adapter ADAPTER`",
    "env": "`tllm doctor`",
    "collect-env": "`tllm doctor`",
}

_DTYPES = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
    "int8": "--quantize int8",
    "int4": "--quantize int4",
}
_CACHE_DTYPES = {
    "q8_0": "int8",
    "fp8_e5m2": "fp8",
    "bfloat16": "auto: as --dtype",
    "float16": "auto: as --dtype",
    "f16": "auto: as --dtype",
}
VALUES_ELSEWHERE = {("--dtype", value): given for value, given in _DTYPES.items()} | {
    ("--kv-cache-dtype", value): given for value, given in _CACHE_DTYPES.items()
}
"""What to give in the place of a value that an option has in other programs: another value, or another option."""

_SAID = (
    # machines and plans
    (
        "give --plan, as dp=2, tp=2, pp=2, cp=2, ep=2 or zero=1, or several joined by commas",
        "--tensor-parallel-size -tp --tp --tp-size --pipeline-parallel-size -pp --pp --pp-size --context-parallel-size "
        "--enable-expert-parallel -ep --ep --ep-size --expert-parallel-size --data-parallel-size -dp --dp --dp-size",
        "JOB",
    ),
    ("give --plan tp=N; tp=1+2 where stages differ", "--tensor-parallel-size -tp --tp --tp-size --num-shard"),
    ("give --plan pp=N", "--pipeline-parallel-size -pp --pp --pp-size"),
    ("give --plan with shares=1:3, or with layers=10+22", "--tensor-split -ts --split-mode -sm"),
    ("give --plan with experts=spread, for whole experts on each rank", "--enable-expert-parallel -ep --ep --ep-size"),
    (
        "one server computes one copy of a model; start one more at another --port for each further copy",
        "--data-parallel-* -dp* --dp --dp-size --api-server-count -asc --workers",
        "--served-model-name",
    ),
    (
        "give --nodes N, which prints the line that each other machine runs; --local N has N processes here",
        "--nnodes --node-rank --num-machines --num_machines --machine-rank --machine_rank --master-* --main_process_* "
        "--dist-init-addr --headless --rpc --distributed-executor-backend --nproc-per-node --nproc_per_node "
        "--num-processes --num_processes --num-gpus --gpus --gpus-per-node",
    ),
    # memory and batches
    (
        "give --max-model-len, the tokens of the longest sequence",
        "--ctx-size -c --context-length --context-size --max-seq-len --num-ctx --n-ctx --max-total-tokens",
    ),
    ("give --max-input-tokens", "--max-input-length --max-prompt-length"),
    (
        "give --kv-cache-memory, bytes of each rank for keys and values; --memory is for all of this machine",
        "--gpu-memory-utilization --mem-fraction-static --kv-cache-memory-bytes --num-gpu-blocks-override",
    ),
    ("give --max-num-seqs", "--parallel -np --n-parallel --max-running-requests --max-batch-size --cuda-graph-max-bs"),
    ("give --page-size, in tokens", "--block-size"),
    ("give --kv-cache-dtype", "--cache-type-k --cache-type-v -ctk -ctv"),
    (
        "a rank keeps its part of the weights in memory: --quantize or more machines make it smaller",
        "--cpu-offload-* --offload-* --swap-space --mlock --no-mmap --mmap",
    ),
    (
        "leave it out: long prompts are computed in pieces, beside replies that are being written",
        "--max-num-batched-tokens --enable-chunked-prefill --no-enable-chunked-prefill --chunked-prefill-size "
        "--max-num-partial-prefills --batch-size -b --ubatch-size -ub --async-scheduling -cb --cont-batching",
        "--max-num-seqs",
    ),
    (
        "leave it out: how layers are computed is chosen by measuring",
        "--enforce-eager --compilation-config -O* --attention-backend --flash-attn -fa --max-seq-len-to-capture "
        "--cuda-graph-* --disable-cuda-graph --enable-torch-compile",
        "--device",
    ),
    ("give --no-enable-prefix-caching", "--disable-radix-cache"),
    (
        "leave it out: the same ranks compute prompts and replies; --cache-dir keeps keys and values on disk",
        "--kv-transfer-config",
    ),
    ("leave it out: prompts that begin alike share pages, see --enable-prefix-caching", "--cache-reuse"),
    (
        "give --device: cpu, cuda or auto",
        "-ngl --n-gpu-layers --gpu-layers --cpu --use-cpu --device-map --main-gpu -mg",
    ),
    ("give --threads", "-t --num-threads --n-threads --threads-batch -tb --cpu-threads"),
    ("give --numa-binding", "--numa"),
    ("the system's `nice` starts a command with another priority", "--prio --prio-batch", "--threads"),
    # the model
    ("the model stands alone behind the command, without an option", "--model --model-id --model-path -m", "MODEL"),
    (
        "the model stands alone behind the command: ORG/NAME, or ORG/NAME:Q4_K_M",
        "--hf-repo -hf -hfr --hf-file -hff",
        "--revision",
    ),
    ("leave it out: code in a model's folder is never run", "--trust-remote-code", "MODEL JOB"),
    (
        "the variable HF_HOME says where models are kept",
        "--download-dir --cache-folder --huggingface-hub-cache",
        "MODEL JOB FOLDER",
    ),
    ("the variable HF_TOKEN says who you are", "--hf-token -hft --use-auth-token", "MODEL JOB"),
    ("give --revision", "--code-revision --tokenizer-revision"),
    ("the tokenizer is the one in the model's folder", "--tokenizer --tokenizer-* --skip-tokenizer-init", "MODEL"),
    ("leave it out: safetensors and GGUF files are told apart", "--load-format --config-format --model-impl", "MODEL"),
    (
        "leave it out: a quantised folder says itself how it is; --quantize rounds plain weights",
        "--quantization -q --load-in-4bit --load-in-8bit --load_in_4bit --load_in_8bit",
    ),
    (
        "write it into the model's config.json",
        "--hf-overrides --rope-* --json-model-override-args --override-kv",
        "MODEL",
    ),
    ("give --served-model-name", "--alias -a"),
    (
        "only text is read",
        "--limit-mm-per-prompt --mm-processor-kwargs --mmproj --language-model-only --image",
        "MODEL",
    ),
    ("give --speculative-config", "--speculative-* --spec-* --model-draft -md --draft --draft-* --hf-repo-draft -hfrd"),
    ("leave it out: an adapter is cut as the linears that it adapts", "--fully-sharded-loras", "--enable-lora"),
    (
        "leave it out: --lora-modules is enough",
        "--enable-lora --max-lora-rank --max-loras",
    ),
    ("give --lora-modules NAME=FOLDER", "--lora-path --lora --lora-paths --lora-scaled --lora-adapters"),
    # HTTP
    (
        "leave it out: every model that is served embeds and scores as well",
        "--task --runner --convert --embedding --embeddings --reranking --rerank --is-embedding",
        "--served-model-name",
    ),
    (
        """give --pooler-config '{"pooling_type": "MEAN"}'""",
        "--pooling --pooling-type --override-pooler-config",
    ),
    (
        "leave it out: tools are on, and their calls are read as the chat template writes them",
        "--enable-auto-tool-choice --tool-server --jinja --no-jinja",
        "--served-model-name",
    ),
    ("leave it out: --reasoning-parser says how reasoning is split off", "--enable-reasoning"),
    (
        "leave it out: a request gives the form of its reply, in response_format",
        "--grammar --grammar-file --grammar-backend --json-schema -j --guided-decoding-backend "
        "--structured-outputs-config",
        "--served-model-name",
    ),
    ("give --chat-template FILE", "--chat-template-file"),
    (
        "it speaks plain HTTP over TCP: a proxy before it adds TLS, a prefix of paths, a Unix socket or other code",
        "--ssl-* --root-path --api-prefix --uds --middleware",
        "--allow-origin",
    ),
    ("give --allow-origin", "--allowed-origins --allowed-methods --allowed-headers --allow-credentials --cors*"),
    (
        "leave it out: requests are counted at /metrics and are not logged; --debug shows more, --quiet less",
        "--disable-log-* --no-enable-log-* --enable-log-* --uvicorn-log-level --log-level --log-requests* --log-* "
        "--verbose -v --disable-uvicorn-access-log --max-log-len",
        "--allow-origin",
    ),
    ("--debug shows more, --quiet less", "--verbose -v --log-level"),
    (
        "leave it out: /metrics is always there",
        "--metrics --slots --props --enable-metrics --enable-server-load-tracking",
        "--served-model-name",
    ),
    ("give --max-request-seconds", "--timeout -to --request-timeout"),
    ("a request gives its own seed", "--seed --random-seed", "--served-model-name"),
    ("give --temperature: 0 takes the likeliest token, more draws one", "--temp --do-sample --greedy"),
    ("give --repetition-penalty", "--repeat-penalty"),
    (
        "requests say it; --override-generation-config says it for those that do not",
        "--temp --temperature --top-k --top-p --min-p --repeat-penalty --repetition-penalty",
        "--served-model-name",
    ),
    (
        "leave it out: temperature, top_k, top_p and min_p say how tokens are drawn",
        "--mirostat*",
        "--override-generation-config",
    ),
    ("leave it out: any number of log-probabilities up to 20 is told", "--max-logprobs", "--served-model-name"),
    (
        "the job's file stands alone behind the command; --set KEY=VALUE changes a key",
        "--config --config-file --job --yaml",
        "JOB",
    ),
    ("options stand on the command line, not in a file", "--config"),
    # generate and chat
    ("give --max-tokens", "-n --n-predict --num-predict --max-new-tokens --max-length --predict"),
    ("give --port", "-p"),
    ("give --prompt", "-p --text --input", "--prompt=TEXT"),
    ('give --prompt "$(cat FILE)"', "--file -f --prompt-file", "--prompt=TEXT"),
    ("give --system", "--system-prompt -sys -sp"),
    ("`tllm chat MODEL --system TEXT` is a conversation", "--system --system-prompt -sys -sp", "--prompt-ids"),
    ("`tllm chat MODEL` is a conversation", "-i --interactive -cnv --conversation --chat", "--prompt-ids"),
    (
        "leave it out: tokens are drawn, beams are not searched",
        "--num-beams --use-beam-search --beam-width",
        "--override-generation-config",
    ),
)
"""What to do, the options of which it is said (`*` is any end), and what it presupposes, one of which a command must
have: an option, OPTION=METAVAR, or the metavar of an argument. The first counts that presupposes, and names, only what
the command has."""


def said_of_option(option: str, known: Collection[str]) -> str | None:
    """What stands here in the place of an option that people know from elsewhere, in a command that has `known`, named
    as `_SAID` does; None for one of which nothing is known."""
    for hint, patterns, *presupposed in _SAID:
        named = set(re.findall(r"--[a-z][a-z-]+", re.sub("`[^`]*`", "", hint)))
        is_apt = named <= set(known) and all(set(names.split()) & set(known) for names in presupposed)
        if is_apt and any(fnmatchcase(option, pattern) for pattern in patterns.split()):
            return hint
    return None


def said_of_value(action: argparse.Action, value: str, known: Collection[str]) -> str | None:
    """What to give in the place of a value that people know from elsewhere, in a command with the options `known`; None
    for one of which nothing is known."""
    option = action.option_strings[-1]
    if (option, value) == ("--dtype", "auto"):
        return f"leave it out: it is then {action.default or 'that of the files'}"
    given = VALUES_ELSEWHERE.get((option, value), "")
    is_here = re.split("[: ]", given)[0] in (*(action.choices or ()), *known)
    return f"give {given}" if is_here else None
