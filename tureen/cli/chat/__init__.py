"""`tureen chat`: a chat in the terminal, with a server that runs or with one of its own."""
