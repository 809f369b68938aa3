"""Tools that language agents may use: a calculator, Python, a search over texts, and servers of the Model Context Protocol."""
