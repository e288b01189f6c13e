"""verl: post-training of language models with reinforcement learning.

Importing this package is light on purpose: it loads neither torch nor any backend.
"""

__version__ = "0.2.0"
