"""How plans come to be, beside the search: for other calls, in chunks, compiled, saved before, agreed among ranks."""
