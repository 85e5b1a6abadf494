"""The console at `/console`: pages for people, made from what the API answers to the key that signed in."""
