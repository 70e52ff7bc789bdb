"""Several processes that train one model: what they say to one another, and what of the model each of them holds."""
