"""SGLang asks for this module beside a CPU; nothing of it is called in a vision tower."""
