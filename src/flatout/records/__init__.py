"""The nouns that stages hand on, as they lie on disk: trace, facts, plan, ceilings. Nothing is judged here."""
