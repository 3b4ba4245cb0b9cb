"""Do pretrained models learn a stream without forgetting?"""
