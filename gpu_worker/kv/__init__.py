"""The pool of KV blocks, and the copies of its blocks that outlast the process."""
