"""How to behave in somebody's process: nothing but the standard library, and no trace in output or tracebacks."""
