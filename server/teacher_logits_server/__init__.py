"""The server: admits students, runs a teacher for them, and lends them what it says.

`app.serve` runs one in a process of its own, `app.serve_in_thread` in a thread of yours.
"""
