"""Programs that make files of the repository: run by hand, never imported by what is shipped."""
