"""The KServe v2 protocol with the tensors of TensorRT-LLM's ensemble, translated to native requests."""
