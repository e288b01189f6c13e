"""Layer 2: the single controller's view of workers: dispatch values, `@register`, worker groups, executors."""
