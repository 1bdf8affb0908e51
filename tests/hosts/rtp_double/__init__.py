"""A double of RTP-LLM: its inputs, caches, graph runner and module tree, as the engine contract describes them.
Data and bookkeeping only: nothing here computes what stepbind computes."""
