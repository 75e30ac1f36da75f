"""Other engines, as the check calls them: fakes that answer sevens."""
