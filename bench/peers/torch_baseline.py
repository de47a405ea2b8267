"""What a user would pick instead, measured on the GPU at hand: PyTorch in BF16 (eager, compiled), its FP8 product, its attention.

Run on the GPU machine next to `coat-bench`, in the same command, so that both are measured in one run:
    python3 bench/peers/torch_baseline.py copy gemm sdpa layer optim model --append rows.jsonl
Every figure is the median of timed CUDA events after warm-up, on random data, as rows of bench/row.ts: the names are those of
coat-bench, `recipe` says which way of PyTorch it was. Needs torch >= 2.6 and, for layer, model and fit, transformers.
"""

import argparse
import datetime
import gc
import json
import platform
import sys
import time
import traceback

import torch
import torch.nn.functional as F

DEVICE = "cuda"
LLAMA_7B = dict(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32, num_hidden_layers=32)
LLAMA_1B = dict(hidden_size=2048, intermediate_size=8192, num_attention_heads=16, num_key_value_heads=16, num_hidden_layers=16)
OPTIONS = argparse.Namespace(append=None, limit_gib=80.0)


def percentile(values, percent):
    """Between neighbours where it falls there, as in bench/row.ts."""
    values = sorted(values)
    place = (len(values) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def row(name, recipe, metric, unit, values, shape, kind="op", formats=None):
    """Prints one row, and adds it to the file that --append names."""
    line = json.dumps(
        {
            "schema": 1,
            "kind": kind,
            "name": name,
            "recipe": recipe,
            "device": "cuda",
            "gpu": torch.cuda.get_device_name(),
            "shape": shape,
            "formats": formats or {},
            "metric": metric,
            "unit": unit,
            "median": percentile(values, 50),
            "p20": percentile(values, 20),
            "p80": percentile(values, 80),
            "n": len(values),
            "baseline": None,
            "commit": "",
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "build": {"node": f"python {platform.python_version()}, torch {torch.__version__}", "cuda": torch.version.cuda},
        }
    )
    print(line, flush=True)
    if OPTIONS.append:
        with open(OPTIONS.append, "a") as file:
            file.write(line + "\n")


def times(call, runs=10, warmup=3):
    """Milliseconds of every call on the device's clock."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(runs):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return found


def rates(amount, milliseconds):
    """Billions a second."""
    return [amount / value / 1e6 for value in milliseconds]


def optional(what, measure):
    """Runs a measurement that this version of PyTorch, or this shape, may not have."""
    try:
        measure()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"{what} was left out: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)


def copy():
    x = torch.empty(2**30, dtype=torch.float32, device=DEVICE)
    y = torch.empty_like(x)
    row("copy", "pytorch", "bandwidth", "GB/s", rates(2 * x.nbytes, times(lambda: y.copy_(x))), {"n": x.numel()})


def gemm(tokens=16384):
    for n, k in ((4096, 4096), (11008, 4096), (4096, 11008)):
        a = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16)
        shape = {"M": tokens, "N": n, "K": k}

        def measured(recipe, formats, call):
            row("matmul_nt", recipe, "flops", "GFLOP/s", rates(2 * tokens * n * k, times(call, 20)), shape, formats=formats)

        measured("pytorch-bf16", {"a": "bf16", "b": "bf16", "y": "bf16"}, lambda: a @ b.t())
        scale_a, scale_b = a.abs().max().float() / 448, b.abs().max().float() / 448
        a8, b8 = (a.float() / scale_a).to(torch.float8_e4m3fn), (b.float() / scale_b).to(torch.float8_e4m3fn)
        g8 = a.to(torch.float8_e5m2)

        def product(x, quick):
            return torch._scaled_mm(x, b8.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=quick)

        formats = {"b": "e4m3/t", "y": "bf16"}
        measured("pytorch-fp8", {"a": "e4m3/t", **formats}, lambda: product(a8, False))
        measured("pytorch-fp8-fast-accumulation", {"a": "e4m3/t", **formats}, lambda: product(a8, True))
        measured("pytorch-fp8", {"a": "e5m2/t", **formats}, lambda: product(g8, False))


def sdpa():
    """FlashAttention-2 and cuDNN. cuDNN's backward, and flash's by default, add with atomics: equal inputs give unequal bits.
    The rows called deterministic are those of torch.use_deterministic_algorithms, which flash alone has."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for b, t, h, j, d in ((8, 2048, 32, 32, 128), (2, 8192, 32, 32, 128), (8, 2048, 32, 32, 64), (8, 2048, 32, 8, 128)):

        def tensor(heads):
            return torch.randn(b, t, heads, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_(True)

        q, k, v, dout = tensor(h), tensor(j), tensor(j), tensor(h).detach()
        shape = {"B": b, "T": t, "H": h, "J": j, "D": d}
        more = {"enable_gqa": True} if h != j else {}
        flop = 2 * b * h * t * t * d  # two products of half a [T, T] matrix

        def measure(recipe):
            def forward():
                return F.scaled_dot_product_attention(q, k, v, is_causal=True, **more)

            def write(name, amount, call):
                formats = {"qkv": "bf16", "out": "bf16"}
                row(name, recipe, "flops", "GFLOP/s", rates(amount, times(call)), shape, formats=formats)

            write("attention_forward", flop, forward)
            out = forward()
            write("attention_backward", 2.5 * flop, lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))

        for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):
            with sdpa_kernel(backend):
                optional(f"{name} {shape}", lambda: measure(f"pytorch-sdpa-{name}"))
        torch.use_deterministic_algorithms(True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            optional(f"deterministic flash {shape}", lambda: measure("pytorch-sdpa-flash-deterministic"))
        torch.use_deterministic_algorithms(False)


def config_of(shape):
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=32000, max_position_embeddings=4096, **shape)
    config._attn_implementation = "sdpa"
    config.use_cache = False
    return config


def layer(b=8, s=2048):
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = config_of(LLAMA_7B)
    block = LlamaDecoderLayer(config, 0).to(DEVICE, torch.bfloat16)
    rotation = LlamaRotaryEmbedding(config).to(DEVICE)
    x = torch.randn(b, s, config.hidden_size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    places = torch.arange(s, device=DEVICE)[None].expand(b, -1)
    embedded = rotation(x, places)
    shape = {"hidden": config.hidden_size, "layers": 1, "batch": b, "sequence": s}
    unit = b * s * config.hidden_size * 2
    for mode, module in (("eager", block), ("compiled", torch.compile(block))):
        recipe = f"pytorch-bf16-{mode}"

        def forward():
            out = module(x, position_embeddings=embedded, position_ids=places)
            return out[0] if isinstance(out, tuple) else out

        def clear():
            x.grad = None
            for param in block.parameters():
                param.grad = None

        def both():
            clear()
            forward().backward(dout)

        row("layer/forward", recipe, "time", "ms", times(forward), shape, kind="step")
        row("layer/both", recipe, "time", "ms", times(both), shape, kind="step")
        clear()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        out = forward()
        saved = torch.cuda.memory_allocated() - before - out.nbytes
        row("layer/saved", recipe, "bytes", "B", [saved], shape, kind="memory")
        row("layer/saved_in_u", recipe, "share", "U", [saved / unit], shape, kind="memory")
        del out


def optim():
    shape = {"L": 1, "M": 16384, "N": 12928}  # the parameters of one layer of Llama-2-7B
    n = shape["M"] * shape["N"]
    for word, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        p = torch.randn(n, device=DEVICE, dtype=dtype).requires_grad_(True)
        p.grad = torch.randn(n, device=DEVICE, dtype=dtype) * 1e-3
        optimizer = torch.optim.AdamW([p], lr=1e-4, fused=True)
        measured = times(optimizer.step)
        formats = {"p": word, "g": word, "m": word, "v": word}
        row("adamw", "pytorch-fused", "time", "ms", measured, shape, formats=formats)
        row("adamw", "pytorch-fused", "bandwidth", "GB/s", rates(7 * p.nbytes, measured), shape, formats=formats)
        del optimizer, p
        torch.cuda.empty_cache()


class Training:
    """Llama with pure BF16 parameters and states on random tokens, its layers compiled or not."""

    def __init__(self, shape, b, s, mode):
        from transformers import LlamaForCausalLM

        torch._dynamo.reset()
        torch.set_default_dtype(torch.bfloat16)
        with torch.device(DEVICE):
            self.model = LlamaForCausalLM(config_of(shape)).train()
        torch.set_default_dtype(torch.float32)
        if mode == "compiled":
            for part in self.model.model.layers:
                part.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.ids = torch.randint(0, 32000, (b, s), device=DEVICE)
        self.targets = torch.roll(self.ids, -1, 1)
        self.loss = torch.compile(lambda z, y: F.cross_entropy(z.float().view(-1, z.size(-1)), y.view(-1)))

    def step(self):
        self.loss(self.model(input_ids=self.ids).logits, self.targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def model():
    for name, shape, b, s in (("llama-2-7b", LLAMA_7B, 4, 2048), ("1b", LLAMA_1B, 16, 2048)):
        for mode in ("eager", "compiled"):
            training = Training(shape, b, s, mode)
            torch.cuda.reset_peak_memory_stats()
            for _ in range(3):
                training.step()
            torch.cuda.synchronize()
            found = []
            for _ in range(6):
                start = time.time()
                training.step()
                torch.cuda.synchronize()
                found.append(1000 * (time.time() - start))
            sizes = {"hidden": shape["hidden_size"], "layers": shape["num_hidden_layers"], "batch": b, "sequence": s}
            recipe = f"pytorch-bf16-{mode}"
            row(f"step/{name}/time", recipe, "time", "ms", found, sizes, kind="step")
            tokens = [b * s / value * 1000 for value in found]
            row(f"step/{name}/tokens", recipe, "tokens", "tokens/s", tokens, sizes, kind="step")
            memory = {"peak/total": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            for what, value in memory.items():
                row(f"step/{name}/{what}", recipe, "bytes", "B", [value], sizes, kind="memory")
            del training
            torch.cuda.empty_cache()


def fit(s=2048):
    """The largest batch of Llama-2-7B that trains within --limit-gib, with compiled layers."""
    limit = int(OPTIONS.limit_gib * 2**30)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))

    def fits(b):
        try:
            training = Training(LLAMA_7B, b, s, "compiled")
            for _ in range(2):
                training.step()
            torch.cuda.synchronize()
            return True
        except torch.OutOfMemoryError:
            return False
        finally:
            training = None
            gc.collect()
            torch.cuda.empty_cache()

    good, bad = 0, 1
    while fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    torch.cuda.set_per_process_memory_fraction(1.0)
    sizes = {"hidden": 4096, "layers": 32, "sequence": s, "limit": limit}
    row("step/llama-2-7b/largest_batch", "pytorch-bf16-compiled", "batch", "sequences", [good], sizes, kind="memory")


PARTS = {part.__name__: part for part in (copy, gemm, sdpa, layer, optim, model, fit)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--append", help="add the rows to the end of this file, as JSON lines")
    parser.add_argument("--limit-gib", type=float, default=80.0, help="what fit may use")
    parser.parse_args(namespace=OPTIONS)
    failed = False
    for part in OPTIONS.parts:
        try:
            PARTS[part]()
        except Exception:
            failed = True
            traceback.print_exc(limit=3)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
