"""Two settings of a fleet on the same requests: is one of them better, and how sure is that?"""
