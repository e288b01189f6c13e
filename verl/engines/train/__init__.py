"""The train engine: micro-batches, fp32 masters, schedule."""
