"""The executable form of a graph: what a forward runs, its leaves, and how its inputs and outputs are put together."""
