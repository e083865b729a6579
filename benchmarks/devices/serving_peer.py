"""The same prompts and replies by `transformers`' own `generate`, on the same device with the same shape.

`python -m benchmarks.devices.serving_peer [--shape 8b] [--sequences 1,8,64] [--prompt 512] [--tokens 128]`
"""

from __future__ import annotations

import time

import torch
import transformers

from benchmarks.devices.figures import append
from benchmarks.devices.serving import STD, llama_config, parser_of
from tllm.devices.choose import choose_device
from tllm.devices.memory import device_name, wait_for


@torch.inference_mode()
def main() -> None:
    args = parser_of(__doc__, tokens=64).parse_args()
    device = choose_device(args.device)
    config = transformers.LlamaConfig.from_dict({**llama_config(args.shape), "attn_implementation": "sdpa"})
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config).train(False)
        for parameter in model.parameters():
            parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(std=STD)
    print(f"transformers {transformers.__version__} on {device_name(device)}, torch {torch.__version__}", flush=True)

    def taken(ids: torch.Tensor, new: int) -> float:
        wait_for(device)
        begun = time.perf_counter()
        model.generate(ids, min_new_tokens=new, max_new_tokens=new, do_sample=False, pad_token_id=0)
        wait_for(device)
        return time.perf_counter() - begun

    for sequences in map(int, args.sequences.split(",")):
        ids = torch.randint(3, 900, (sequences, args.prompt), device=device)
        taken(ids, 3)
        first, whole = min(taken(ids, 1) for _ in range(2)), min(taken(ids, args.tokens + 1) for _ in range(2))
        token = (whole - first) / args.tokens
        found = dict(
            by=f"transformers {transformers.__version__}",
            device=device_name(device),
            torch=str(torch.__version__),
            shape=args.shape,
            sequences=sequences,
            prompt=args.prompt,
            tokens=args.tokens,
            prompt_seconds=first,
            token_seconds=token,
        )
        append(args.out, found)
        print(
            f"{sequences:3} sequences: prompts {first * 1e3:8.1f} ms; a token {token * 1e3:6.2f} ms, "
            f"{sequences / token:7.0f} tokens/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
