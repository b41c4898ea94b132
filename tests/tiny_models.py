"""Pretrained checkpoints small enough to be made by a test."""

from transformers import LlamaConfig, LlamaForCausalLM


def save_tiny_llama(folder, vocab_size=100):
    """Save a Llama of two layers with random weights, and no tokenizer."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
