"""The pool of KV blocks, and copies of its blocks that outlive the process."""
