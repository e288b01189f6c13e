"""Layer 4: which placement and layouts make a step shortest, worked out on paper. Pure; starts and loads nothing."""
