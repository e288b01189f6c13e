"""Layer 2: moving weights from the layout that trains to the layout that generates."""
