"""Keys, tokens and signatures, with batch functions as the primary form."""
