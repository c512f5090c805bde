"""The Transformer language model, in Haiku."""
