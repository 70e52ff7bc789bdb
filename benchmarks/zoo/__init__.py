"""Other people's models: built small, trained three steps, plain and optimised, compared bit by bit."""
