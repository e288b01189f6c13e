"""Layer 4: the roles. A worker owns an engine and says which columns it reads and writes."""
