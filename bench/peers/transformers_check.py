"""Models between coat-fp8 and Hugging Face transformers, both ways: logits and gradients.

    npm run build
    python3 bench/peers/transformers_check.py <folder of stories260k> <work folder> [cpu|cuda]

Needs torch, transformers and node, and no network. The last argument is the device of this library; transformers computes
on the CPU. Prints a line a comparison and exits with 1 when one is too far off.
"""

import json
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

stories, work = Path(sys.argv[1]), Path(sys.argv[2])
device = sys.argv[3] if len(sys.argv) > 3 else "cpu"
program = Path(__file__).resolve().parents[2] / "dist/bench/peers/transformers.js"
work.mkdir(parents=True, exist_ok=True)
wrong = []


def node(*args):
    subprocess.run(["node", str(program), *map(str, args), device], check=True)


def compare(what, ours, theirs, most):
    """Relative distance in the Euclidean norm."""
    ours, theirs = ours.double().flatten(), theirs.double().flatten()
    distance = float((ours - theirs).norm() / theirs.norm().clamp_min(1e-30))
    verdict = "ok" if distance <= most else "TOO FAR"
    print(f"{what:60} {distance:.2e}  of at most {most:.0e}  {verdict}")
    if not distance <= most:
        wrong.append(what)


def run(model, tokens):
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()


def load(folder, dtype):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").to(dtype)
    return model.eval()


# BF16 has 8 bits: two computations in it that round at other places differ by a few of its steps.
limits = {"fp32": (torch.float32, 1e-4, 1e-3), "bf16": (torch.bfloat16, 2e-2, 1e-1)}

# ---- saved here, loaded there ----

node("give", stories, work)
tokens = json.loads((stories / "golden.json").read_text())["prompt64"]["token_ids"]
exact = load(stories, torch.float32)
for recipe, (dtype, of_logits, of_gradients) in limits.items():
    ours = load_file(work / f"ours-{recipe}.safetensors")
    model = load(work / f"ours-{recipe}", dtype)
    if recipe == "fp32":
        state, saved = exact.state_dict(), model.state_dict()
        same = state.keys() == saved.keys() and all(torch.equal(saved[name], state[name]) for name in state)
        print(f"{'parameters saved in f32 are those that were loaded':60} {same}")
        if not same:
            wrong.append("parameters")
    compare(f"{recipe}: logits of the folder saved here", ours["logits"], run(model, tokens), of_logits)
    compare(f"{recipe}: logits against those in f32", ours["logits"], run(exact, tokens), of_logits)
    model.zero_grad()
    loss = model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss
    loss.backward()
    compare(f"{recipe}: loss", ours["loss"], loss.detach().float(), of_logits)
    for name, parameter in model.named_parameters():
        key = f"gradient {name}"
        if key in ours:
            compare(f"{recipe}: {key}", ours[key], parameter.grad.float(), of_gradients)
        else:
            wrong.append(key)
            print(f"{recipe}: {key} is missing")

# ---- saved there, loaded here ----

sizes = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
llama3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
models = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_theta": 500.0, "rope_scaling": llama3},
    "llama-linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "mistral": {"sliding_window": None, "head_dim": 24},
    "mistral-window": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": False, "rope_theta": 1e6},
    "olmo": {},
}
torch.manual_seed(0)
given = [(17 * i + 3) % 256 for i in range(96)]
expected = {}
for name, change in models.items():
    kind = name.split("-")[0].replace("llama3", "llama")
    config = type(AutoConfig.for_model(kind)).from_dict({"model_type": kind, **sizes, **change})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():  # biases start as zeros
        if parameter.dim() == 1:
            parameter.data.add_(0.2 * torch.randn_like(parameter))
    folder = work / f"theirs-{name}"
    model.save_pretrained(folder)
    (work / f"theirs-{name}.json").write_text(json.dumps(given))
    expected[name] = run(model, given)
node("take", work)
for name, logits in expected.items():
    taken = load_file(work / f"taken-{name}.safetensors")
    compare(f"{name} saved there: logits in fp32", taken["logits fp32"], logits, 1e-4)
    compare(f"{name} saved there: logits in bf16", taken["logits bf16"], logits, 5e-2)

print(f"{len(wrong)} of the comparisons failed" if wrong else "all hold")
sys.exit(1 if wrong else 0)
