"""The screens, one module each: which calls of the API a screen makes, and what it shows of the answers."""
