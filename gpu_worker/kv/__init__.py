"""The pool of KV blocks, and the copies of its blocks that outlive the process."""
