"""OpenAI's Files and Batches APIs."""
