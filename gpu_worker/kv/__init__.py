"""The pool of KV blocks, and the memory that outlives its process."""
