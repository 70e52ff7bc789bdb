"""The executable form of a graph: what a forward runs, opaque modules, how inputs and outputs are put together."""
