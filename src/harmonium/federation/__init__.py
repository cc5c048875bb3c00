"""How server and clients work together: what crosses, who asks whom, how uploads combine."""
