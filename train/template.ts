// What `coat-train init` writes: a configuration that runs as soon as its paths are right.

export const template = `// A run of coat-train: npx coat-train config.json. Comments and trailing commas are allowed.
{
  // A new model of these sizes; or one to fine-tune: { "from": "./SmolLM2" }, a folder in Hugging Face layout.
  "model": {
    "config": {
      "model_type": "llama", // or mistral, qwen2, olmo
      "hidden_size": 128,
      "intermediate_size": 344,
      "num_hidden_layers": 4,
      "num_attention_heads": 4,
      "max_position_embeddings": 256,
      "tie_word_embeddings": true,
    },
  },
  "recipe": "coat", // fp32, bf16 or coat
  // "device": "cuda", // else the best there is
  "seed": 1, // of the first weights
  // "freeze": ["model.embed_tokens.*"], // parameters that stay as they are

  "data": {
    "text": "book.txt", // files or folders; or "jsonl": chats and texts; or "tokens": what coat-train prepare wrote
    // "tokenizer": "./SmolLM2", // a tokenizer.json; else that of model.from, else bytes
    "sequence": 256,
    "seed": 1, // of the order
    "heldOut": 0.05,
  },
  "batch": 16, // sequences at a time
  "accumulate": 1, // batches of a step
  "steps": 200,
  "clip": 1, // largest norm of the gradients
  // "recompute": "layer", // less memory, more work; "optimizerInBackward" and "cacheWeights" trade likewise
  // "graph": true, // on a GPU: steps as CUDA graphs, for small models
  "maxSkips": 10, // steps that may be skipped in a row

  "optimizer": { "rule": "adamw", "lr": 2e-3, "betas": [0.9, 0.95], "weightDecay": 0.1 }, // or lion, sgd
  "schedule": { "name": "cosine", "warmup": 20, "floor": 0.1 }, // or constant, linear, wsd (with "decay": steps)
  "spike": { "sigma": 8, "window": 64 }, // skip steps whose loss or gradient norm jumps that far

  "validate": { "every": 100, "sequences": 64 },
  "checkpoint": { "every": 100, "keep": 3 }, // for --resume
  "out": "runs/first", // metrics.jsonl, tensorboard/, report.html, checkpoints/, model/
  // "save": { "dtype": "bf16" }, // of model/; else as in training
  "sample": { "prompt": "The ", "maxTokens": 100, "temperature": 0.8 }, // said at the end
}
`
