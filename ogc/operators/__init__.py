"""All that is special about single operators: their low-memory forms, and how they work in parts of a batch."""
