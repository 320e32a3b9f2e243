"""Who may enter now."""

from gateway.admission.authenticator import Authenticator
from gateway.admission.controller import AdmissionController

__all__ = ["AdmissionController", "Authenticator"]
