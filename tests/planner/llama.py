"""The shape of Llama 3 8B, for which the planner's tests plan."""

LLAMA = {
    "layers": 32,
    "dim": 4096,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "mlp_dim": 14336,
    "vocab_size": 128256,
    "tied_embeddings": False,
}
