"""Layer 3: engines that train (`train`) and engines that generate (`rollout`)."""
