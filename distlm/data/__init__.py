"""From text to batches, in numpy alone: which tokens each step trains on.

corpora (documents) -> tokenizers (ids) -> token_store (one flat array on disk)
-> loader (the batch of a step) -> prefetch (a few batches ahead).
"""
