"""A request's path through the router: validate, tokenize, choose a cell, submit, relay."""
