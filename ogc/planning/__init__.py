"""How plans come to be, beside the search: for other calls, in slices, compiled, saved before, agreed among ranks."""
