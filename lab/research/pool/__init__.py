"""One pool of KV blocks of several sizes: buddy runs, compaction, tables of requests; a baseline, with its oracles."""
