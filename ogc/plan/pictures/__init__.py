"""Pictures of plans and frontiers, for readers of papers and of pull requests. They need matplotlib."""
