"""Executors: how worker groups run. The embedded one is `local`."""
