"""Which plan each part gets: the ways to run one, and the best combination of these."""
